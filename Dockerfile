# docker build -t ax . && docker run --network host ax server
# The API binds to the loopback only, so the container shares the host's network.
FROM rust:1-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked --package ax-scheduler --bin ax

FROM debian:bookworm-slim
RUN useradd --system --create-home --home-dir /var/lib/ax ax
COPY --from=build /src/target/release/ax /usr/local/bin/ax
USER ax
WORKDIR /var/lib/ax
ENTRYPOINT ["ax"]
