#!/bin/bash
# Builds an image where there is no registry, on a base that debootstrap makes from this machine's own Debian mirror. Needs root,
# debootstrap and buildah. What follows the name goes to buildah: build arguments, or mounts of pip's settings.
#   deploy/containers/without_registry.sh environment
#   deploy/containers/without_registry.sh trainer --build-arg ENGINES= --build-arg EXTRAS=cpu -v /etc/pip.conf:/etc/pip.conf:ro
set -euo pipefail
cd "$(dirname "$0")/../.."
name=${1:?which: environment, relay or trainer}
shift
file=deploy/containers/Containerfile.$name
export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot} STORAGE_DRIVER=${STORAGE_DRIVER:-vfs}
bases=$(sed -n 's/^FROM \([^ ]*\).*/\1/p' "$file" | sort -u)
base=${bases%%$'\n'*}
if [[ $bases != "$base" || $base != */python:3.11-*-bookworm ]]; then
    echo "$file begins from ${bases//$'\n'/ and }, not from a plain Python on Debian 12 alone: it needs a registry" >&2
    exit 2
fi
if ! buildah inspect --type image "$base" > /dev/null 2>&1; then
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -n 1)
    debootstrap --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates bookworm "$root" "$mirror"
    rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED "$root"/var/cache/apt/archives/*.deb
    ln -s python3 "$root/usr/bin/python"
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$root" /
    buildah config --env PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin --cmd python3 "$container"
    buildah commit --quiet --rm "$container" "$base"
fi
buildah bud --pull-never --layers "$@" --file "$file" --tag "rl-coserve-$name" .
