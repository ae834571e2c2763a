# resile: the operator, masters, and agents without torch. Training images add torch, or install resile themselves.
#   docker build -t resile:dev .
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
WORKDIR /src
RUN python -m venv /opt/resile && /opt/resile/bin/pip install --no-cache-dir --upgrade pip
# The dependencies alone first: they change seldom, and their layer is kept.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; print('\n'.join(tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']))" \
      > requirements.txt \
    && /opt/resile/bin/pip install --no-cache-dir -c constraints.txt -r requirements.txt
COPY README.md LICENSE ./
COPY src src
RUN /opt/resile/bin/pip install --no-cache-dir --no-deps . \
    && /opt/resile/bin/pip uninstall --yes pip \
    && /opt/resile/bin/resile --version

FROM python:${PYTHON}-slim
LABEL org.opencontainers.image.title="resile" \
      org.opencontainers.image.description="Elastic, fault-tolerant distributed training" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/resile/bin:$PATH \
    PYTHONUNBUFFERED=1
RUN groupadd --gid 65532 resile && useradd --uid 65532 --gid 65532 --no-create-home --shell /usr/sbin/nologin resile
COPY --from=build /opt/resile /opt/resile
WORKDIR /workspace
COPY examples examples
USER 65532:65532
ENTRYPOINT ["resile"]
