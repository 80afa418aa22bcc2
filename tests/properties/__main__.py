"""Runs one case again, as a failing test prints it.

python -m tests.properties "Case(replicas=2, batch=3)"
"""

import sys

from tests.properties.case import Case
from tests.properties.case_trainer import find_differences
from tests.support import process  # noqa: F401  (splits the CPU, as for the tests)

for line in find_differences(eval(sys.argv[1], {"Case": Case})) or ["no difference"]:
    print(line)
