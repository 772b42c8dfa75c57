#!/usr/bin/env bash
# Tries cases of one kind with all cores of a machine that has neither cargo nor this repository: a program of tests alone is
# run, as many times at once as there are cores. What it prints is a piece of a proof for each of them:
# `FORNAX_FUZZ_PIECES=FILE:FILE... cargo xtask prove fuzz-KIND` adds pieces up and records them.
set -eu
if [ $# != 6 ]; then
    echo "usage: $0 PROGRAM TEST COMMIT FIRST CASES SECONDS (of each process)" >&2
    exit 2
fi
program=$1 test=$2 commit=$3 first=$4 cases=$5 seconds=$6

cores=$(nproc)
each=$(((cases + cores - 1) / cores))
cpu=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | sed -n 1p)
memory=$(sed -n 's/^MemTotal: *//p' /proc/meminfo)
# Adapters, tokenizer files and databases are written for each case: in memory that is ten times as fast.
if [ -d /dev/shm ]; then
    export TMPDIR=/dev/shm
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for number in $(seq 0 $((cores - 1))); do
    (
        echo "PIECE of $test from $((first + number * each)) at $commit on ${cpu:-unknown}, $cores cores, $memory memory"
        FORNAX_FUZZ_FIRST=$((first + number * each)) FORNAX_FUZZ_CASES=$each FORNAX_FUZZ_SECONDS=$seconds \
            FORNAX_FUZZ_LAST="$work/$number.last" \
            timeout -k 5 $((seconds + 40)) "$program" --exact "$test" --nocapture && exit 0
        echo "ended with status $?; the last case was FORNAX_FUZZ_FIRST=$(cat "$work/$number.last")"
    ) >"$work/$number.log" 2>&1 &
done
wait
cat "$work"/*.log
