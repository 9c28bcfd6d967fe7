#!/bin/sh
# Make the second environment, in which vLLM serves models on the CPU: sh scripts/make_vllm_env.sh [folder]
#
# vLLM pins another torch and transformers than this project, so the two cannot share one. The folder is $VLLM_VENV or
# .venv-vllm unless given; 3.4 GB. PYTHON is the interpreter it is made from, 3.11 or newer. TORCH_INDEX, for example
# https://download.pytorch.org/whl/cpu, makes pip take PyTorch's build without CUDA, several gigabytes smaller.
set -eu

venv=${1:-${VLLM_VENV:-.venv-vllm}}
lock=$(dirname "$0")/../requirements-vllm.lock
if [ -e "$venv/installed" ] && cmp -s "$venv/installed" "$lock"; then
    echo "$venv is up to date"
    exit
fi
"${PYTHON:-python3}" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check --quiet"
rest=$venv/rest.lock
grep -v '^torch==' "$lock" >"$rest"

$pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' "$lock")" "$(grep '^numpy==' "$lock")"
$pip install --no-deps -r "$rest"
"$venv/bin/python" -c 'import vllm; print("vllm", vllm.__version__, "is installed")'
cp "$lock" "$venv/installed"
