#!/usr/bin/env bash
# graphs.sh [MODEL.gguf...]: compute the graphs of models (by default, a small one of each family in the tests) with llama.cpp for
# arm64 in qemu-user, with both levels of NEON, and compare every tensor with this machine's. No root. Exits 1 if any differs.
# The families take a minute of a core, a model of 135M ten.
. "$(dirname "${BASH_SOURCE[0]}")/parts.sh"
lay_out "$work/disk"
cp -r tests "$work/disk/edgeinfer/"
models=$work/disk/models
mkdir "$models"
[ $# = 0 ] || cp "$@" "$models/"
export PYTHONPATH=$PWD:$PWD/tests/made
read -r variant level < <(.venv/bin/python - "$models" $# <<'PYTHON'
import sys
from pathlib import Path
from made_families import FAMILIES, make_family
from edgeinfer.runtime.llama import libedgeinfer, libllama
if sys.argv[2] == "0":
    for family in FAMILIES:
        make_family(Path(sys.argv[1], family.split(" ")[0] + ".gguf"), family)
libllama.lib()
variant = libedgeinfer.variant_of(libedgeinfer.cpu_library())
print(variant, libedgeinfer.level_of(variant))
PYTHON
)
python=$PWD/.venv/bin/python
(cd "$models" && "$python" "$OLDPWD/tests/made/graph_digests.py" "$variant" "$level" *.gguf) >"$work/$level.json"

cat >"$work/inside" <<'INSIDE'
for place in proc dev; do bind /$place "$root/$place"; done
bind "$work/disk" "$root/work"
chroot "$root" /usr/bin/env -i HOME=/work/home TMPDIR=/work/tmp LC_ALL=C.UTF-8 PATH=/usr/bin:/bin PYTHONPATH=/work/edgeinfer QEMU_CPU="$1" \
    /bin/bash -c 'cd /work/models && exec /work/venv/bin/python /work/edgeinfer/tests/made/graph_digests.py "$@" *.gguf' - "$2" "$3"
INSIDE
as_arm64 neoverse-n1 armv8.2_2 dotprod >"$work/dotprod.json"
as_arm64 max armv8.6_2 i8mm >"$work/i8mm.json"
"$python" - "$work"/{"$level",dotprod,i8mm}.json <<'PYTHON'
import json
import sys
from pathlib import Path
here, *others = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
differ = 0
for name, both in sorted(here.items()):
    tensors = [tensor for computed in both for tensor in computed["tensors"]]
    for level, other in zip(("dotprod", "i8mm"), others, strict=True):
        theirs = [tensor for computed in other[name] for tensor in computed["tensors"]]
        wrong = [tensor for tensor, same in zip(tensors, theirs, strict=True) if tensor != same]
        differ += len(wrong)
        print(f"{name}: {len(wrong)} of {len(tensors)} tensors differ with {level}", *wrong[:1])
sys.exit(1 if differ else 0)
PYTHON
