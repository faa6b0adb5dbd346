#!/usr/bin/env bash
# The checklist of a release. Every line is a command; a version is released when the last one says "all passed".
#   scripts/release_check.sh [--quick | --allow-missing]      --quick: without the test suite, wheels and roots
# Needs the environment of the tests (pip install '.[test,sbom]'), root, debootstrap, hadolint, cffconvert, buildah, nvcc
# and aarch64-linux-gnu-g++. What is missing is named and fails the check unless --allow-missing says otherwise.
# OUT=DIR: the wheels are left there (a new folder); default: one in /tmp.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
case ${1:-} in '' | --quick | --allow-missing) quick=${1:-} ;; *) echo "release_check: no such option: $1" >&2; exit 2 ;; esac
python=${PYTHON:-python3}
passed=0 failed=0 missing=()

step() { # step <title> <command...>
    local title=$1 log
    log=$(mktemp)
    shift
    SECONDS=0
    if "$@" >"$log" 2>&1; then
        echo "ok      $title (${SECONDS} s)"
        passed=$((passed + 1))
    else
        echo "FAILED  $title: $*"
        tail -15 "$log" | sed 's/^/        /'
        failed=$((failed + 1))
    fi
    rm -f "$log"
}

tool() { # tool <name> <title> <command...>: a step where the tool is there
    if command -v "$1" >/dev/null; then step "${@:2}"; else missing+=("$1"); fi
}

version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' python/ggml_kvq/_version.py)
changelog() { grep -q "^## \[$version\] - 20[0-9][0-9]-[01][0-9]-[0-3][0-9]$" CHANGELOG.md || { echo "CHANGELOG.md has no '## [$version] - DATE'"; return 1; }; }
clean() { [ -z "$(git status --porcelain)" ] || { git status --short; return 1; }; }
untagged() { ! git rev-parse -q --verify "refs/tags/v$version" >/dev/null || { echo "v$version is tagged already"; return 1; }; }

step "nothing is uncommitted" clean
step "version $version is dated in CHANGELOG.md" changelog
step "version $version is new" untagged
step "one version everywhere, citation, files that are named" "$python" -m pytest -q -n 0 tests/test_release.py
step "style and types" "$python" -m pytest -q -n 0 tests/test_lint.py
step "tables are those of the rows" "$python" scripts/update_results.py --check
step "the site builds strict, no dead link" "$python" -m pytest -q -n 0 tests/test_site.py
step "the pinned source has its hash" "$python" scripts/fetch_llama_cpp.py
tool cffconvert "CITATION.cff is valid" cffconvert --validate -i CITATION.cff
tool hadolint "Dockerfile" hadolint Dockerfile
tool hadolint "Dockerfile.cuda" hadolint Dockerfile.cuda
if [ "$quick" != --quick ]; then
    out=${OUT:-$(mktemp -d "${TMPDIR:-/tmp}/ggml-kvq-release.XXXXXX")}
    mkdir -p "$out"
    [ -z "$(ls -A "$out")" ] || { echo "release_check: $out is not empty" >&2; exit 2; }
    step "the two commands of the README on a clean clone (.ci/run)" env CI=true bash .ci/run
    step "the CPU wheel" scripts/build_wheels.sh --out "$out" cpu
    tool nvcc "the CUDA wheel" scripts/build_wheels.sh --out "$out" cuda
    tool aarch64-linux-gnu-g++ "the AArch64 wheel" scripts/build_wheels.sh --out "$out" aarch64
    addon=$(echo "$out"/ggml_kvq_cu13-"$version"-*.whl)
    [ -f "$addon" ] || addon=
    step "bare Debian 12 and 13 answer" env ADDON="$addon" scripts/check_wheel.sh "$out"/ggml_kvq-"$version"-*x86_64.whl
    tool buildah "the CPU image answers" scripts/check_container.sh "$out"/ggml_kvq-"$version"-*x86_64.whl
    for wheel in "$out"/*.whl; do
        step "bill of materials of $(basename "$wheel")" "$python" scripts/make_sbom.py "$wheel" -o "${wheel%.whl}.cdx.json" --licences "${wheel%.whl}.licences.md"
        if [ "${wheel%aarch64.whl}" != "$wheel" ]; then
            tool qemu-aarch64-static "bare Debian 13 for AArch64 answers" scripts/check_wheel.sh "$wheel" trixie
        fi
    done
    echo "        wheels: $out"
fi
missed=$(printf "%s\n" "${missing[@]}" | sort -u | tr '\n' ' ')
[ -z "${missed// /}" ] || echo "note    not here, so not checked: $missed"
if [ $failed -ne 0 ]; then
    echo "release check: $failed of $((passed + failed)) failed"
    exit 1
fi
if [ -n "${missed// /}" ] && [ -z "$quick" ]; then
    echo "release check: $passed passed, but not all was checked; --allow-missing accepts that"
    exit 1
fi
[ "$quick" = --quick ] && { echo "release check: $passed passed, quick: wheels and suite were not run"; exit 0; }
[ -z "${missed// /}" ] || { echo "release check: $passed passed, not checked: $missed"; exit 0; }
echo "release check: all passed"
