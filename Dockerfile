# One image for every Ray node. Ray needs the same Python and the same Ray on all of them.
#
# CPU:  docker build -t outrider:0.1.0 .
# GPU:  docker build -t outrider:0.1.0-gpu \
#         --build-arg BASE_IMAGE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 \
#         --build-arg APT_PACKAGES="gcc libc6-dev python3-dev" \
#         --build-arg OUTRIDER_EXTRAS="[gpu]" .
#
# TORCH_PIP_ARGS goes to the `pip install` of torch alone, so that torch can come from the wheel
# index of your accelerator (or the much smaller one for CPUs) and the rest from your usual one.

# The base pins Python: 3.11 to 3.12, which is checked below. CUDA bases get their system's own.
ARG BASE_IMAGE=python:3.11.13-slim-bookworm

FROM ${BASE_IMAGE} AS base
# wget and bash: KubeRay's own probes and its wait for the head run in them.
# APT_PACKAGES: Triton compiles its launchers on first use and needs a C compiler on GPUs.
ARG APT_PACKAGES=""
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bash ca-certificates wget ${APT_PACKAGES} \
    && (command -v python3 || apt-get install --yes --no-install-recommends python3 python3-venv) \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -c "import sys; assert (3, 11) <= sys.version_info < (3, 13), sys.version" \
    && useradd --uid 10001 --create-home --shell /bin/bash ray

FROM base AS build
ARG TORCH_PIP_ARGS=""
ARG OUTRIDER_EXTRAS=""
# The manifests' rayVersion.
ARG RAY_VERSION=2.60.0
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The largest parts change least: layers of their own, before the source.
RUN python3 -m venv /opt/outrider \
    && /opt/outrider/bin/pip install ${TORCH_PIP_ARGS} "torch>=2.10,<2.14"
RUN /opt/outrider/bin/pip install "ray[serve]==${RAY_VERSION}"
COPY . /src
RUN /opt/outrider/bin/pip install "/src${OUTRIDER_EXTRAS}"

FROM base
COPY --from=build /opt/outrider /opt/outrider
# The demo models, where the manifests find them whatever Python's version.
RUN ln -s /opt/outrider/lib/python3.*/site-packages/outrider/demo/models /opt/models
# Login shells reset PATH, and KubeRay starts Ray in one where it is told to.
RUN echo 'export PATH=/opt/outrider/bin:$PATH' > /etc/profile.d/outrider.sh
# Torch threads that spin while they wait slow down every other worker of the pod.
ENV PATH=/opt/outrider/bin:$PATH \
    GOMP_SPINCOUNT=0 \
    OMP_WAIT_POLICY=PASSIVE \
    TOKENIZERS_PARALLELISM=false \
    HF_HUB_OFFLINE=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    PYTHONUNBUFFERED=1
# numba compiles kernels on a node's first start, for that node's CPU (15 s), and keeps them
# in ~/.cache: compiled here, they would be slower or not run on nodes unlike the builder.
# By number, so that `runAsNonRoot` can be checked before the container starts.
USER 10001
WORKDIR /home/ray
RUN ray --version && outrider --help > /dev/null \
    && test -r /opt/models/target/model.safetensors
CMD ["outrider", "--help"]
