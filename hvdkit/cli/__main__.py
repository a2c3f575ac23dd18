"""`python -m hvdkit.cli` is `hvdkit`, for when its script is not on PATH."""

from hvdkit.cli import main

if __name__ == "__main__":
    main(prog_name="hvdkit")
