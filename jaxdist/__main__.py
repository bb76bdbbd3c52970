"""The command `jaxdist` as `python -m jaxdist`."""

from jaxdist.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
