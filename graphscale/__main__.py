"""`python -m graphscale`: the same as the console script."""

from graphscale.cli import main

main()
