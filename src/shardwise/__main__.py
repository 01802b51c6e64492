"""`python -m shardwise`, for torchrun: `torchrun -m shardwise calibrate ...`."""

import sys

from shardwise.cli import main

sys.exit(main())
