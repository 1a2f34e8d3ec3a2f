#!/bin/sh
# A search by an array job, each task a worker of one study; then a job that retrains the best settings:
#
#   sh search.sh job.toml /shared/runs/search 8 --partition=gpu --gpus=1
#
# The study is a journal in the folder, or the database that SLIPSTREAM_STORAGE names.
set -eu
config=$1 folder=$2 tasks=$3
shift 3
job=$(dirname "$0")/job.sbatch
mkdir -p "$folder"
export SLIPSTREAM_STORAGE="${SLIPSTREAM_STORAGE:-journal:$folder/study.log}"

array=$(sbatch --parsable --array="0-$((tasks - 1))" "$@" "$job" \
    tune "$config" --folder "$folder/worker-%a" --set tune.retrain=0)
sbatch --dependency="afterok:$array" --kill-on-invalid-dep=yes "$@" "$job" \
    tune "$config" --folder "$folder/result"
