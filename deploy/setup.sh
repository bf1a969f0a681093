#!/bin/sh
# Prepares the database for nodes that serve more than loopback: the schema, and a token `admin`, which is left in a file
# and made anew when either the token or the file is gone. Safe to run again and again.
#
#   AX_DATABASE_URL=postgres://… sh setup.sh FILE
set -eu
umask 077
file=$1

ax migrate
if [ -s "$file" ] && ax token ls --json | grep -q '"name":"admin"'; then
  echo "the token admin is in $file"
  exit 0
fi
ax token revoke admin >/dev/null 2>&1 || true
ax token create admin --role admin >"$file.new"
mv "$file.new" "$file"
echo "the token admin is new, and in $file"
