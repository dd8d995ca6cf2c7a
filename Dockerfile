# The server in one image: `docker run -p 8000:8000 -v rehydrate:/data IMAGE`, or compose.yaml with a PostgreSQL beside it.
FROM python:3.11-slim AS build

WORKDIR /build
COPY requirements.txt .
RUN python -m venv /venv \
    && /venv/bin/pip install --no-cache-dir --require-hashes -r requirements.txt

FROM python:3.11-slim

# An account without rights; PostgreSQL would refuse to run as root.
RUN useradd --system --create-home --uid 10001 rehydrate \
    && install --directory --owner=rehydrate --mode=0700 /data
COPY --from=build /venv /venv
WORKDIR /srv
COPY --chown=root:root manage.py pyproject.toml LICENSE README.md ./
COPY --chown=root:root rehydrate rehydrate
COPY --chown=root:root approvals approvals
COPY --chown=root:root audit audit
COPY --chown=root:root templates templates
COPY --chown=root:root static static
COPY --chown=root:root locale locale
# Compiled now, since the account that runs cannot write here.
RUN /venv/bin/python -c "from rehydrate.catalogs import compile_stale; compile_stale(['locale'])" \
    && /venv/bin/python -m compileall -q rehydrate approvals audit

ENV PATH=/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    REHYDRATE_DATA=/data
USER rehydrate
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=4s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/healthz', timeout=3)"]
# exec form: `up` is process 1, gets the signal itself, and ends all the others.
CMD ["python", "manage.py", "up", "--host", "0.0.0.0", "--port", "8000"]
