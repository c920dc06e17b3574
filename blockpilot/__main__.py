"""`python -m blockpilot` lists the stages."""

from blockpilot.app.help import docstring, stages


def main() -> None:
    """Print every stage with the first line of what it says of itself."""
    print("python -m blockpilot.<stage> --help says what a stage can be told. Stages:\n")
    for name in stages():
        print(f"  {name:9} {docstring(name).splitlines()[0].partition(': ')[2]}")


if __name__ == "__main__":
    main()
