"""Entry point of the small Python inside the shipped file, which unpacks the application once."""

import sys

from edgeinfer.platform.early_ctrl_c import end_quietly, raise_on_ctrl_c

end_quietly()  # Ctrl-C may come while the other modules are imported

from edgeinfer.shipping.unpack import main  # noqa: E402

raise_on_ctrl_c()  # from here on, Ctrl-C must remove the files that were unpacked so far
sys.exit(main())
