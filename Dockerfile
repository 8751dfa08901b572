# glm4v-patched for NVIDIA GPUs; docs/docker.md says how to build and run it.
# The toolkit is of the CUDA that PyPI's torch is built for: DeepSpeed compiles its optimizer for
# engine.offload with it.
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends python3 python3-venv python3-dev g++ git \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/glm4v
ENV PATH=/opt/glm4v/bin:$PATH HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache
COPY LICENSE README.md pyproject.toml /src/
COPY docs/docker /src/docs/docker
COPY glm4v_patched /src/glm4v_patched
RUN /src/docs/docker/install.sh /src
WORKDIR /work
ENTRYPOINT ["glm4v-patched"]
CMD ["doctor"]
