"""What `apart` starts: `python -m slipstream.doctor TECHNIQUE DEVICE` tries one technique.

Its last line on stdout is what was found, as JSON.
"""

from __future__ import annotations

import sys

from slipstream.doctor import techniques
from slipstream.runs import to_json

if __name__ == "__main__":  # workers may import this once more
    found = techniques.try_one(*sys.argv[1:])
    sys.stdout.write("\n" + to_json(found, indent=None) + "\n")
