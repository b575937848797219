"""Entry point of the small Python inside the shipped file: unpacks the application the first time."""

import sys

from edgeinfer.platform.early_ctrl_c import end_quietly, raise_on_ctrl_c

end_quietly()  # Ctrl-C may come while the other modules are imported

from edgeinfer.shipping.unpack import main  # noqa: E402

raise_on_ctrl_c()  # from here on, it removes what was unpacked
sys.exit(main())
