// main.mjs MODULE ARCHIVE PROMPT IDS: what main.c does, from Node. The module imports nothing.
import { readFileSync } from "node:fs";

const [module, archivePath, promptText, idsText] = process.argv.slice(2);
const { instance } = await WebAssembly.instantiate(readFileSync(module), {});
const { memory, __heap_base, k3_memory_needed, k3_generate } = instance.exports;

// Parts of the module's memory behind its own data, on borders of 64 bytes.
let end = __heap_base.value;
function place(bytes) {
  const at = Math.ceil(end / 64) * 64;
  end = at + bytes;
  const missing = end - memory.buffer.byteLength;
  if (missing > 0) memory.grow(Math.ceil(missing / 65536));
  return at;
}
function put(bytes) {
  const at = place(bytes.length);
  new Uint8Array(memory.buffer).set(bytes, at);
  return at;
}
function check(what, fault) {
  if (fault !== 0) {
    console.error(`${what}: ${fault}`);
    process.exit(1);
  }
}

const archive = readFileSync(archivePath);
const prompt = new TextEncoder().encode(promptText);
const length = Number(idsText);
const [archiveAt, promptAt, idsAt, outAt] = [put(archive), put(prompt), place(4 * length), place(24)];
check("k3_memory_needed", k3_memory_needed(archiveAt, archive.length, length, prompt.length, outAt));
const needed = new DataView(memory.buffer).getUint32(outAt, true);
const memoryAt = place(needed);
check(
  "k3_generate",
  k3_generate(archiveAt, archive.length, memoryAt, needed, promptAt, prompt.length, idsAt, length, outAt, outAt + 8),
);

const out = new DataView(memory.buffer);
const ids = Array.from({ length: out.getUint32(outAt + 4, true) }, (_, i) => out.getUint32(idsAt + 4 * i, true));
const prompted = out.getUint32(outAt, true);
console.log(["prompt", ...ids.slice(0, prompted)].join(" "));
console.log(["generated", ...ids.slice(prompted)].join(" "));
console.log(`bits ${out.getBigUint64(outAt + 8, true).toString(16).padStart(16, "0")}`);
console.error(`${archive.length} bytes of archive, ${needed} of memory`);
