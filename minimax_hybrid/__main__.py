"""`python -m minimax_hybrid` is the command `minimax-hybrid`."""

import sys

from .cli import main

sys.exit(main())
