"""`python -m slipstream.workers`: the process of a worker, which reads its task from stdin."""

import sys

from slipstream.workers.child import main

sys.exit(main())
