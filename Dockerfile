# syntax=docker/dockerfile:1
# docker build -t ax .     then see docker-compose.yml and docs/deployment.md
FROM rust:1.94-bookworm AS build
WORKDIR /src
COPY . .
# The caches stay on the builder; what is taken out of them has to leave within the same step.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/usr/local/cargo/git \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked --package ax-scheduler --bin ax \
    && install -D --strip target/release/ax /out/ax

FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="ax" \
      org.opencontainers.image.description="A distributed task scheduler on NATS JetStream" \
      org.opencontainers.image.licenses="Apache-2.0"
# Certificates for tls:// of NATS and https:// of a receiver of traces.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/ax ax
COPY --from=build /out/ax /usr/local/bin/ax
USER 10001
WORKDIR /var/lib/ax
EXPOSE 8420
# `ax server` hands the lead over and ends; a second one would end it at once.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 CMD ["ax", "health"]
ENTRYPOINT ["ax"]
CMD ["server"]
