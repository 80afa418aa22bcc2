"""What the code of a step can ask about its replica: its rows, and those of the others.

Each name is imported when it is first used (PEP 562): `import ctl.replica` does not import TensorFlow.
"""

from typing import TYPE_CHECKING

from ctl import lazy

if TYPE_CHECKING:
    from ctl.built import metric_updates
    from ctl.rows import row_mask
    from ctl.rows.gather import all_gather as all_gather
    from ctl.rows.gather import positions as positions
    from ctl.rows.means import mean_of_rows as mean_of_rows
    from ctl.rows.row_mask import Rows as Rows
    from ctl.rows.row_mask import current as current
    from ctl.rows.row_mask import examples as examples
    from ctl.rows.views import views as views

    present = row_mask.current_mask
    update_metric = metric_updates.update

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    {
        ".built.metric_updates": "update=update_metric",
        ".rows.gather": "all_gather positions",
        ".rows.means": "mean_of_rows",
        ".rows.row_mask": "Rows current current_mask=present examples",
        ".rows.views": "views",
    },
)
