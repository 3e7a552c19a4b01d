// run.mjs PROGRAM [ARG...]: the runner of WASI programs.
import { readFileSync } from "node:fs";
import { WASI } from "node:wasi";

const [program, ...args] = process.argv.slice(2);
// Some tests read fixtures.
const preopens = { "/": "/" };
const wasi = new WASI({ version: "preview1", args: [program, ...args], env: {}, preopens, returnOnExit: true });
const { instance } = await WebAssembly.instantiate(readFileSync(program), {
  wasi_snapshot_preview1: wasi.wasiImport,
});
process.exit(wasi.start(instance));
