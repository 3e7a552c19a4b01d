#!/bin/bash
# run.sh TARGET [SECONDS]: one fuzz target under libFuzzer with address sanitizer, from the committed
# corpus and the seeds, for so many seconds of its own CPU time: what else a machine does makes it later and
# not shorter. What it keeps stays in work/TARGET, findings in artifacts/TARGET (both ignored by git). Needs a
# nightly toolchain and cargo-fuzz.
set -euo pipefail
cd "$(dirname "$0")"

target=${1:?usage: run.sh TARGET [SECONDS]}
seconds=${2:-600}
mkdir -p "work/$target" "corpus/$target" "artifacts/$target"
max_len=$(cargo +nightly run --quiet --bin seeds -- "$target" "work/$target" "work/$target.dict")
[ -s "work/$target.dict" ] && dictionary=(-dict="work/$target.dict") || dictionary=()
cargo +nightly fuzz build --fuzz-dir . "$target"

# Seconds of user time that what ended so far has taken, in $spent. The shell itself has to ask: a subshell would
# be told of its own children.
spent() {
    times >"work/$target.times"
    spent=$(awk 'NR == 2 { split($1, t, "[ms]"); print int(60 * t[1] + t[2]) }' "work/$target.times")
}

spent
end=$((spent + seconds))
# The limits are part of the check: memory by what was read and not by what a file claims, and no
# input of these lengths that takes a second. Leaks are not looked for: a thread that is just ending has
# memory that nothing points to. libFuzzer knows only the clock, so it runs again until the time is spent.
while spent && [ "$spent" -lt "$end" ]; do
    cargo +nightly fuzz run --fuzz-dir . "$target" "work/$target" "corpus/$target" -- \
        "${dictionary[@]}" -max_len="$max_len" -max_total_time="$((end - spent))" -timeout=5 -report_slow_units=1 \
        -rss_limit_mb=1024 -malloc_limit_mb=64 -detect_leaks=0 -print_final_stats=1 \
        -artifact_prefix="artifacts/$target/"
done
