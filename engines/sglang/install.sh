#!/bin/sh
# SGLang in a virtual environment of its own, for tests on a machine without a GPU.
#
#   engines/sglang/install.sh VENV
#
# PYTHON=python3.12 chooses the interpreter, TORCH_INDEX=https://download.pytorch.org/whl/cpu the build of torch.
#
# A second run does nothing, unless this folder's versions changed.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
venv=${1:?usage: install.sh VENV}
version=0.5.23
stamp="$venv/.installed"
wanted="sglang $version $(cksum < "$here/requirements.txt")"

if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

"${PYTHON:-python3}" -m venv --clear "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check install --quiet"
# PyPI's torch brings CUDA along, which is larger and works as well: TORCH_INDEX may name an index without.
$pip ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r "$here/requirements.txt"
# Without its own dependencies: they are the CUDA builds.
$pip --no-deps "sglang==$version"
echo "$wanted" > "$stamp"
