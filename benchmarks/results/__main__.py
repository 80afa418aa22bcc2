"""Writes the tables of all measurements into the pages of the documentation."""

from benchmarks import results

if __name__ == "__main__":
    for path, text in results.pages():
        path.write_text(text)
