#!/usr/bin/env bash
# Run sweeps side by side for a limited time, and keep an archive of what they have written.
#
#     paper/run_plans.sh ARCHIVE.tgz SECONDS PROCESSES < lines
#
# Each line has the words after `catnat sweep`, so that --only divides a plan among processes:
#
#     paper/plans/certainty.yaml --engine batched --only head=softmax,sigmoid
#
# Lines start in their order, and none starts or goes on after that time. The archive has the rows
# and defaults in paper/ and the event files in runs/ that are newer than the start; it is renewed
# every 20 seconds. Unpacked in the root of the repository, it lets the same lines continue, and
# collect_curves.py write the curves.
set -eu
archive=$1 seconds=$2 processes=$3
started=$(mktemp)
export ends=$(($(date +%s) + seconds))

keep() {
  mkdir -p runs
  find paper runs -newer "$started" -not -path '*/.locks/*' \
    \( -name runs.csv -o -name defaults.yaml -o -name 'events.out.*' \) -print0 |
    tar --null --files-from=- -czf "$archive.partial"
  mv "$archive.partial" "$archive"
}

run() {
  left=$((ends - $(date +%s)))
  if ((left > 0)); then timeout -k 15 "$left" python -m catnat sweep $1 || true; fi
}
export -f run

(while sleep 20; do keep; done) &
keeper=$!
xargs -P "$processes" -d '\n' -I LINE bash -c 'run "LINE"'
kill "$keeper"
keep
tar -tzf "$archive" | grep -v events || true
