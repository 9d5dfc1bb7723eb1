"""`python -m attngen` is the command `attngen`."""

from attngen.cli import main

main()
