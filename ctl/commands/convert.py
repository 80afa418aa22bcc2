"""ctl convert FILE...: converts record files, so that they can be read in random order.

    ctl convert "data/train-*.tfrecord.gz" --output=data/plain
    ctl convert "data/train-*" --output=data/arrays --format=array_record

Compressed TFRecord files are written uncompressed to another folder, under the same names without
`.gz` or `.zlib`. `--format=array_record` writes ArrayRecord files (the package array-record), and
ArrayRecord files become TFRecord files.
"""

from collections.abc import Sequence

from ctl.commands import Parser
from ctl.errors import print_line
from ctl.hardware import installation


def main(arguments: Sequence[str]) -> int:
    """Converts the files, and prints a line about each; returns the exit code.

    Raises:
        UsageError: no file matches, or a file is damaged or would be replaced by the result.
    """
    parser = Parser("ctl convert", "ctl convert FILE... --output=FOLDER", __doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="paths or patterns")
    parser.add_argument("--output", required=True, help="the folder of the new files")
    parser.add_argument("--format", choices=("tfrecord", "array_record"), default="tfrecord")
    flags = parser.parse_args(list(arguments))
    installation.prepare_import()
    # Imported once the arguments are checked: TensorFlow takes seconds.
    from ctl.data.files import convert, record_index

    paths = record_index.find_files(flags.files, "ctl convert")
    for number, path in enumerate(paths, start=1):
        output, count = convert.convert(path, flags.output, output_format=flags.format)
        print_line(f"{number} of {len(paths)}: {output}, {count} records")
    return 0
