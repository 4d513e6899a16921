"""``python -m numpyro_fspace`` is the command ``fspace``."""

import sys

from numpyro_fspace.cli import main

sys.exit(main())
