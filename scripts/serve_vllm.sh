#!/bin/sh
# Serve a model on this machine's CPU for rollout=vllm: sh scripts/serve_vllm.sh <folder or hub id> [port] [options of vLLM]
#
#   sh scripts/serve_vllm.sh outputs/mine/final 8000
#   sh scripts/serve_vllm.sh outputs/mine/final 8000 --enable-lora --max-lora-rank 16      # for rollout.sync=lora
#
# The environment is $VLLM_VENV or .venv-vllm (scripts/make_vllm_env.sh). It listens on 127.0.0.1 alone: the endpoints
# that take weights (VLLM_SERVER_DEV_MODE) let whoever reaches them run what they like.
set -eu

model=${1:?give the folder or hub id of a model}
port=${2:-8000}
shift
[ $# -eq 0 ] || shift
export VLLM_SERVER_DEV_MODE=1                 # /collective_rpc, /reset_prefix_cache
export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True  # /v1/load_lora_adapter
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"  # GiB
export VLLM_NO_USAGE_STATS=1
unset OMP_NUM_THREADS # set for tests, it would leave the server one core

# --no-enable-chunked-prefill: on the CPU, vLLM 0.32 dies where it cuts up the prompt of a request that has a seed.
exec "${VLLM_VENV:-.venv-vllm}/bin/python" -m vllm.entrypoints.openai.api_server --model "$model" \
    --host 127.0.0.1 --port "$port" --enforce-eager --no-enable-chunked-prefill \
    --logprobs-mode processed_logprobs "$@"
