# An image that a CPI, Kubernetes or a user starts like a stemcell. Its base is a stemcell, or plain Debian or Ubuntu, to which
# it adds the packages of a stemcell. It also adds the overlay and, in /opt/agent_shim, the agent with its own interpreter and
# init. Nothing is downloaded at run time.
#
#   docker build -t agent-shim .                                                      # also podman, buildah
#   docker build --build-arg REVISION=$(git rev-parse HEAD) -t agent-shim .           # name the commit in the image
#   docker build --build-arg BASE_IMAGE=debian:bookworm-slim -t agent-shim .
#   docker build --build-arg COMPILERS= -t agent-shim .          # for instances that never compile packages
#   docker build --build-arg TIER=slim -t agent-shim .           # without programs that only some releases call
#   docker build --build-arg DEBUGGER=gdb -t agent-shim .
#   docker build --target overlay -o dist .                      # only the overlay, to apply to a root file system
#   docker build --target volume -t agent-shim-volume .          # only /opt/agent_shim, for a volume over an unmodified stemcell
#   docker build --target renderer -t agent-shim-renderer .      # `agent-shim render` with ruby, for an init container
#
# Behind a mirror or a private CA, use --secret id=pip_conf,src=pip.conf --secret id=ca_bundle,src=ca.crt; neither is stored in
# the image (docs/kubernetes.md).
ARG BASE_IMAGE=ghcr.io/cloudfoundry/ubuntu-noble-stemcell:latest

# --- /opt/agent_shim --------------------------------------------------------------------------------------------------
FROM ${BASE_IMAGE} AS build
# Python 3.11 or newer: the default of noble (3.12), bookworm (3.11) and trixie (3.13), or python3.11 on jammy (default 3.10).
ARG PYTHON=python3
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ${PYTHON} ${PYTHON}-venv s6 patchelf binutils gcc musl-tools \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# Copy an interpreter and an init, which neither package upgrades nor releases can change.
COPY stemcell_overlay/make make
RUN ${PYTHON} make/interpreter /opt/agent_shim/python && make/init /opt/agent_shim/s6
COPY requirements requirements
# /build is an environment with pip. It builds this project's wheel and installs it into /opt/agent_shim, which has no pip.
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca_bundle,target=/run/secrets/ca.crt \
    if [ -s /run/secrets/ca.crt ]; then export PIP_CERT=/run/secrets/ca.crt; fi \
    && export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all: PIP_REQUIRE_HASHES=1 \
    && ${PYTHON} -m venv /build \
    && /opt/agent_shim/python/bin/python3 -m venv --without-pip /opt/agent_shim \
    && /build/bin/pip install -r requirements/build.lock \
    && /build/bin/pip --python /opt/agent_shim/bin/python3 install -r requirements/runtime.lock
COPY LICENSE README.md pyproject.toml hatch_build.py ./
COPY agent_shim agent_shim
COPY tools/__init__.py tools/shell_pages.py tools/
# Compile once, without docstrings. Without the compiled files the agent would take four times as long to start. Symbols are
# stripped, because they make up two thirds of the libraries in wheels.
ARG REVISION=
RUN export AGENT_SHIM_REVISION="${REVISION}" \
    && /build/bin/pip wheel --no-deps --no-index --no-build-isolation --wheel-dir /dist . \
    && /build/bin/pip --python /opt/agent_shim/bin/python3 install --no-deps --no-index /dist/*.whl \
    && for name in bosh-agent bpm monit; do ln -s agent-shim /opt/agent_shim/bin/${name} || exit; done \
    && /opt/agent_shim/bin/python3 make/compile /opt/agent_shim/lib /opt/agent_shim/python/lib \
    && find /opt/agent_shim/lib -name '*.so' -exec strip --strip-unneeded {} +
# The overlay is stored beside the program. An image applies it when it is built, an unmodified stemcell when it starts.
COPY stemcell_overlay/apply stemcell_overlay/manifest.toml stemcell_overlay/start /opt/agent_shim/overlay/
COPY stemcell_overlay/rootfs /opt/agent_shim/overlay/rootfs
COPY systemd /opt/agent_shim/systemd
RUN PYTHONDONTWRITEBYTECODE=1 /opt/agent_shim/python/bin/python3 /opt/agent_shim/overlay/apply /

# --- /opt/agent_shim alone, for a volume ------------------------------------------------------------------------------
FROM scratch AS volume
COPY --from=build /opt/agent_shim /

# --- the overlay alone ------------------------------------------------------------------------------------------------
FROM scratch AS overlay
COPY --from=build /opt/agent_shim /stemcell_overlay/program
COPY stemcell_overlay /stemcell_overlay
COPY systemd /systemd

# --- agent-shim render, for an init container and for machines without ruby ----------------------------------------------
FROM ${BASE_IMAGE} AS renderer
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ruby openssl libexpat1 libffi8 \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/agent_shim /opt/agent_shim
WORKDIR /work
ENTRYPOINT ["/opt/agent_shim/bin/agent-shim", "render"]

# --- the packages of a stemcell ---------------------------------------------------------------------------------------
FROM ${BASE_IMAGE} AS system
# Programs that scripts of CPIs and of typical releases call. A stemcell has most of them.
ARG PACKAGES="bash bzip2 ca-certificates cron curl dnsutils file gawk iproute2 iptables less libcap2-bin locales \
    logrotate lsof mount net-tools netcat-openbsd nftables openssh-server openssl perl procps psmisc python3 rsync rsyslog \
    strace sudo tar tini tzdata unzip util-linux vim-tiny wget xz-utils zip zstd"
# Tools for `bosh ssh`; `bosh pcap` runs tcpdump. A debugger (gdb, 30 MB on bookworm) is optional.
ARG TOOLS="iputils-arping iputils-ping tcpdump traceroute"
ARG DEBUGGER=
# Modules that syslog-release loads.
ARG SYSLOG="rsyslog-gnutls rsyslog-openssl rsyslog-relp"
# Packages that are installed if the distribution has them. Ubuntu 26.04 has no runit and gets a stand-in for chpst. The LXD
# CPI leaves addresses to DHCP.
ARG OPTIONAL="runit udhcpc"
# Compilers for BOSH packages.
ARG COMPILERS="bison build-essential cmake flex gettext libssl-dev pkg-config zlib1g-dev libreadline-dev"
# The tier `slim` has only these packages, which the agent, logins and bpm need. It lacks cron, rsyslog, and the packages for
# release scripts.
ARG TIER=full
ARG SLIM="bash bzip2 ca-certificates curl iproute2 libcap2-bin libexpat1 libffi8 locales mount openssh-server openssl procps sudo \
    tar tzdata util-linux xz-utils zstd"
# Manuals and translations of messages are not installed, but licences are.
ARG EXCLUDED="/usr/share/doc/* /usr/share/man/* /usr/share/info/* /usr/share/locale/* /usr/share/lintian/*"
# bpm guarantees its processes the locale en_US.UTF-8. Host keys belong to a machine, not to an image.
# hadolint ignore=SC2086
RUN apt-get update \
    && for package in ${OPTIONAL}; do \
        if apt-cache show "${package}" >/dev/null 2>&1; then there="${there} ${package}"; fi; \
    done \
    && if [ "${TIER}" = slim ]; then wanted="${SLIM} ${DEBUGGER}"; \
    else wanted="${PACKAGES} ${TOOLS} ${DEBUGGER} ${SYSLOG} ${there} ${COMPILERS}"; fi \
    && set -f \
    && for path in ${EXCLUDED}; do without="${without} -o Dpkg::Options::=--path-exclude=${path}"; done \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ${without} -o "Dpkg::Options::=--path-include=/usr/share/doc/*/copyright" ${wanted} \
    && set +f \
    && apt-get clean && rm -rf /var/lib/apt/lists/* /var/cache/ldconfig /etc/ssh/ssh_host_*_key* \
        /var/log/apt/* /var/log/alternatives.log /var/log/dpkg.log \
    && localedef -i en_US -c -f UTF-8 en_US.UTF-8 \
    && if [ "${TIER}" = slim ]; then rm -r /usr/share/i18n; fi

# --- the image --------------------------------------------------------------------------------------------------------
FROM system
COPY --from=build /opt/agent_shim /opt/agent_shim
# Replace /etc/hosts, /etc/resolv.conf and the like with blank files. The base's files often contain the resolver and host name
# of some machine, and `apply` cannot replace them, because the builder has mounted its own files over them.
COPY stemcell_overlay/blank /
RUN PYTHONDONTWRITEBYTECODE=1 /opt/agent_shim/python/bin/python3 /opt/agent_shim/overlay/apply /

# The version for /var/vcap/bosh/etc and the stemcell's manifest defaults to that of the base. The version in the labels, for
# tools that inspect images, defaults to that of this project.
ARG STEMCELL_VERSION=
RUN if [ -n "${STEMCELL_VERSION}" ]; then printf %s "${STEMCELL_VERSION}" >/var/vcap/bosh/etc/stemcell_version; fi
ARG VERSION=0.3.0-dev
ARG REVISION=
ARG CREATED=
LABEL org.opencontainers.image.title="agent_shim" \
    org.opencontainers.image.description="A BOSH stemcell for containers and pods" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.source="https://github.com/agent-shim/agent-shim" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.created="${CREATED}" \
    io.bosh.stemcell.version="${STEMCELL_VERSION:-0.3.0-dev}" \
    io.bosh.stemcell.api_version="3"

# Set no entry point, because CPIs replace CMD with their own command, and an entry point would be put before that command.
ENTRYPOINT []
CMD ["/sbin/init"]
# Set the stop signal, because a base that uses systemd sets SIGRTMIN+3, which this init cannot catch.
STOPSIGNAL SIGTERM
