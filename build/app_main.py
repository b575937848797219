"""Entry point of `edgeinfer-app`, the shipped application: run a module, or the command line."""

import runpy
import sys

from edgeinfer.platform.early_ctrl_c import end_quietly, raise_on_ctrl_c

end_quietly()  # Ctrl-C may come while the other modules are imported

from edgeinfer.platform.process import MODULE_SWITCH  # noqa: E402
from edgeinfer.shipping.shipped import prefer_newer_cxx, restore_environment, trust_certificates  # noqa: E402

restore_environment()
prefer_newer_cxx()
trust_certificates()
if sys.argv[1:2] == [MODULE_SWITCH]:
    raise_on_ctrl_c()
    del sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    from edgeinfer.cli.main import main
    from edgeinfer.shipping.unpack import tidy

    tidy()
    sys.exit(main())
