"""Entry point of the small Python inside the shipped file: unpacks the application the first time."""

import sys

from edgeinfer.shipping.unpack import main

sys.exit(main())
