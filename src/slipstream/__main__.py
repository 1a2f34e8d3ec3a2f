import sys

if not sys.flags.safe_path:
    # `python -m` puts the working folder first: with somebody else's run there, its modules would
    # be imported instead of installed ones
    del sys.path[0]

from slipstream.cli import main

main()
