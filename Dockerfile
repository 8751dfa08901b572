# glm4v-patched for NVIDIA GPUs; docs/docker.md says how to build and run it.
# The toolkit is of the CUDA that PyPI's torch is built for: DeepSpeed compiles its optimizer for
# engine.offload with it.
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends python3 python3-venv python3-dev g++ git \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/glm4v
ENV PATH=/opt/glm4v/bin:$PATH HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache HOME=/cache
COPY LICENSE README.md pyproject.toml /src/
COPY docs/docker /src/docs/docker
COPY glm4v_patched /src/glm4v_patched
RUN /src/docs/docker/install.sh /src && install -d -m 1777 /work /cache
WORKDIR /work
# Nothing here needs root; --user names another user.
USER 1000:1000
ENTRYPOINT ["glm4v-patched"]
CMD ["doctor"]
# Of a container that serves; any other one answers no request and is "unhealthy" without an effect.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
