"""`python -m ctl.report RUN...`: a page about one run or several; see ctl/commands/report.py."""

import sys

from ctl import main

if __name__ == "__main__":
    sys.exit(main.run([sys.argv[0], "report", *sys.argv[1:]]))
