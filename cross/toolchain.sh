#!/bin/bash
# toolchain.sh DIR: unpacks Debian's rustc and the standard library's source beside whatever Rust is
# installed. rustup's cargo drives it; nothing outside DIR changes. Needs `apt-get update` to have run.
set -euo pipefail

dir=$1
mkdir -p "$dir/debs"
dir=$(cd "$dir" && pwd)

# Two names carry versions that a security update may change, so they are looked up.
std=$(apt-cache depends libstd-rust-web-dev | awk '/Depends: libstd-rust-web-[0-9]/ { print $2; exit }')
cd "$dir/debs"
apt-get download -q rustc-web libstd-rust-web-dev rust-web-src "$std"
llvm=$(dpkg-deb -f "$std"_*.deb Depends | tr ',' '\n' | awk '/libllvm/ { print $1; exit }')
apt-get download -q "$llvm"
for deb in *.deb; do
    dpkg -x "$deb" "$dir"
done
cd "$dir"
rm -r "$dir/debs"

for tool in rustc rustdoc; do
    cat > "$dir/$tool" <<WRAPPER
#!/bin/sh
LD_LIBRARY_PATH="$dir/usr/lib/x86_64-linux-gnu\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}" exec "$dir/usr/bin/$tool" "\$@"
WRAPPER
    chmod +x "$dir/$tool"
done
"$dir/rustc" --version
