#!/bin/sh
# A run with many folds or repeats by an array job, each task a share of them; then a job that joins and
# scores the shares:
#
#   sh folds.sh job.toml /shared/runs/folds 8 --partition=gpu --gpus=1
set -eu
config=$1 folder=$2 tasks=$3
shift 3
job=$(dirname "$0")/job.sbatch

array=$(sbatch --parsable --array="1-$tasks" "$@" "$job" \
    train "$config" --folder "$folder" --share "%a/$tasks")
sbatch --dependency="afterok:$array" --kill-on-invalid-dep=yes "$@" "$job" \
    train "$config" --folder "$folder"
