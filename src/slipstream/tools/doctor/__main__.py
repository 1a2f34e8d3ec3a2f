"""Tries one technique in a process: `python -m slipstream.tools.doctor TECHNIQUE DEVICE`.

The last line on stdout is the result as JSON.
"""

import sys

from slipstream.runs import to_json
from slipstream.tools.doctor import techniques

if __name__ == "__main__":  # DataLoader workers import this module again
    result = techniques.try_by_name(*sys.argv[1:])
    sys.stdout.write("\n" + to_json(result, indent=None) + "\n")
