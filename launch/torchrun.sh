#!/usr/bin/env bash
# A node's part of a run: a process for each GPU. Call it on every node with the same arguments for cli.py:
#
#   launch/torchrun.sh fit -c configs/choice/paper.yaml -c configs/scale/fsdp.yaml            # all GPUs of one node
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 IFNAME=eth0 launch/torchrun.sh fit …            # on the first of two
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 IFNAME=eth0 launch/torchrun.sh fit …            # and on the second
#
#   for rank in {0..15}; do                                                                   # sixteen: node0 … node15
#       ssh "node$rank" "cd $PWD && NNODES=16 NODE_RANK=$rank MASTER_ADDR=node0 IFNAME=eth0 launch/torchrun.sh fit …" &
#   done; wait
#
# NNODES          number of nodes (1)
# NODE_RANK       which of them this is, from 0 (0)
# NPROC_PER_NODE  processes on a node, the same on all (its GPUs, else 1)
# MASTER_ADDR     address of node 0 (needed for several nodes)
# MASTER_PORT     a port that is free there (29500)
# IFNAME          network interface by which the nodes reach each other; without it a node whose name is in its own
#                 /etc/hosts is not found by the others
# STOP_SECONDS    how long a process may take to end its step and save after a signal (600)
# PYTHON          interpreter (.venv/bin/python)
# HF_HUB_OFFLINE  1 (the default) takes models and data from local folders and the cache alone: fill that first
#
# All nodes need the same code, and the same run_dir on a shared file system. --ckpt_path last among the arguments lets
# the same command begin a run and go on with it. SIGTERM, SIGUSR1 and Ctrl-C are handed on to the processes, which
# save and end; torchrun itself then ends with 1, whatever they ended with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

nnodes=${NNODES:-1}
python=${PYTHON:-.venv/bin/python}
processes=${NPROC_PER_NODE:-$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')}

if ((nnodes == 1)); then
    place=(--standalone)
    interface=${IFNAME:-lo}
else
    if [[ -z ${MASTER_ADDR:-} ]]; then
        echo "error: MASTER_ADDR: expected the address of node 0, got nothing" >&2
        exit 2
    fi
    # Not c10d: there a torchrun whose node 0 vanishes without closing its connections waits for it for ever.
    place=(--rdzv-backend static --node-rank "${NODE_RANK:-0}")
    place+=(--master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
    interface=${IFNAME:-}
fi
if [[ -n $interface ]]; then
    export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
fi
threads=$(($(nproc) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export TOKENIZERS_PARALLELISM=false
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # else stack traces of every broken connection

exec "$python" -m torch.distributed.run --nnodes "$nnodes" --nproc-per-node "$processes" "${place[@]}" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGUSR1 --shutdown-timeout "${STOP_SECONDS:-600}" \
    cli.py "$@" --trainer.num_nodes "$nnodes" --trainer.devices "$processes"
