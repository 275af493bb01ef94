# An image with odsgd, for CPUs or for CUDA 11.2:
#
#     docker build -t odsgd .
#     docker build -t odsgd:cu112 --build-arg BASE=nvidia/cuda:11.2.2-cudnn8-runtime-ubuntu20.04 \
#         --build-arg MXNET=cu112 .
#
# BASE is a Debian or Ubuntu with Python 3.8 to 3.12; MXNET an extra of setup.py. Packages come from where apt and pip
# are configured to look; PIP_INDEX_URL may be given as a build argument. Data, checkpoints and scripts are mounted, or
# copied in by an image of your own on top of this one.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG MXNET=cpu
ARG PIP_INDEX_URL

RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates libgomp1 libquadmath0 openssh-client python3 python3-venv rsync \
    && rm -rf /var/lib/apt/lists/*

COPY setup.py pyproject.toml README.md LICENSE /src/
COPY kvstore /src/kvstore
COPY odsgd /src/odsgd

# GluonCV asks for the OpenCV with windows, which needs the libraries of a desktop; its twin without replaces it.
RUN python3 -m venv /opt/odsgd \
    && /opt/odsgd/bin/pip install --no-cache-dir --upgrade pip setuptools wheel \
    && /opt/odsgd/bin/pip install --no-cache-dir "/src[${MXNET},mpi,plot,board]" \
    && /opt/odsgd/bin/pip install --no-cache-dir --no-deps --force-reinstall "opencv-python-headless>=4.5,<4.12" \
    && rm -rf /src

ENV PATH=/opt/odsgd/bin:$PATH
WORKDIR /job

# A pod of `odsgd launch --launcher kubernetes`, which needs its environment alone; any other command runs as well.
CMD ["python3", "-m", "odsgd.launch.pod"]
