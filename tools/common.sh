# shellcheck shell=bash
# Sourced by the other tools: the one build that the demo, the lab, the tests and lint share, and progress lines.

# Cargo with the profile of CI. Workspace crates are compiled by clippy's driver, so that lints come with the build instead of after
# a second one.
cargo_ci() { # cargo's verb, arguments…
    local verb=$1 driver
    shift
    driver=$(command -v clippy-driver) ||
        { echo "${0##*/}: clippy-driver is missing; run 'rustup component add clippy'." >&2; return 1; }
    set -- env CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__ \
        cargo --config "build.rustc-workspace-wrapper='$driver'" "$verb" --locked --profile ci "$@"
    # In a subshell of its own cargo takes the subshell's process, so that ending that process ends cargo.
    if [ "${replace_shell:-no}" = yes ]; then
        exec "$@"
    fi
    "$@"
}

# Every crate, test, example and fuzz target. The cluster service is built with etcd, since another selection of features would build most
# libraries a second time.
everything=(--workspace --all-targets --features causeway/etcd)

# Builds with a line every ten seconds that counts crates.
build_with_progress() { # who says it, file of output, crates in all, command that builds…
    local who=$1 log=$2 all=$3 running status=0 began=$SECONDS
    shift 3
    (replace_shell=yes && "$@") >"$log" 2>&1 &
    running=$!
    while kill -0 "$running" 2>/dev/null; do
        sleep 1
        if [ $(((SECONDS - began) % 10)) -eq 9 ]; then
            printf '%s: %d s: %d of %d crates begun, the last one %s\n' "$who" $((SECONDS - began)) \
                "$(grep -c '^ *Compiling' "$log")" "$all" "$(grep '^ *Compiling' "$log" | tail -n 1 | awk '{print $2}')"
        fi
    done
    wait "$running" || status=$?
    if [ "$status" != 0 ]; then
        grep -v '^ *Compiling' "$log" >&2
    fi
    return "$status"
}

# How many crates a build of these packages has.
crates_of() { # arguments of cargo tree…
    cargo tree --locked --prefix none "$@" 2>/dev/null | awk '{print $1, $2}' | sort -u | wc -l
}
