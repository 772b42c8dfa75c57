// Makes the committed bundles again from npm: `node make.mjs`; with `--check` it only compares. The versions and the
// checksum of every package are in package-lock.json, which `npm ci` is held to.
import { execFileSync } from "node:child_process";
import { createHash } from "node:crypto";
import { existsSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync, copyFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { createRequire } from "node:module";

const here = dirname(fileURLToPath(import.meta.url));
const entries = ["markdown-it", "temml", "highlight"];
const check = process.argv.includes("--check");

// Beside the sources nothing is left behind.
const folder = mkdtempSync(join(tmpdir(), "fornax-console-"));
const made = new Map();
try {
  for (const name of ["package.json", "package-lock.json", ...entries.map((entry) => `${entry}.mjs`)]) copyFileSync(join(here, name), join(folder, name));
  execFileSync("npm", ["ci", "--no-audit", "--no-fund", "--loglevel=error"], { cwd: folder, stdio: "inherit" });
  const esbuild = createRequire(join(folder, "package.json"))("esbuild");
  const packages = new Map();
  for (const entry of entries) {
    const result = await esbuild.build({
      absWorkingDir: folder, entryPoints: [`${entry}.mjs`], bundle: true, minify: true, format: "esm", target: "es2022", write: false,
      metafile: true, legalComments: "none", charset: "utf8", banner: { js: "// Bundled by bundle/make.mjs; licences in /console/licences.txt." },
    });
    made.set(`${entry}.js`, result.outputFiles[0].text);
    for (const input of Object.keys(result.metafile.inputs)) {
      const [, name] = /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(input) ?? [];
      if (name) packages.set(name, join(folder, "node_modules", name));
    }
  }
  // The font of script letters is left out: a browser's own mathematical font has them.
  const sheet = readFileSync(join(folder, "node_modules/temml/dist/Temml-Local.css"), "utf8");
  const { code } = await esbuild.transform(sheet.replace(/@font-face\s*\{[^}]*\}/g, ""), { loader: "css", minify: true });
  made.set("temml.css", code);
  const texts = [...packages].sort().map(([name, at]) => {
    const { version, license } = JSON.parse(readFileSync(join(at, "package.json"), "utf8"));
    const file = readdirSync(at).find((name) => /^licen[cs]e/i.test(name));
    if (!file) throw new Error(`${name} has no licence file`);
    return `${name} ${version} (${license})\n\n${readFileSync(join(at, file), "utf8").trim()}\n`;
  });
  made.set("licences.txt", `Libraries of the console, under their own licences.\n\n${texts.join(`\n${"-".repeat(80)}\n\n`)}`);
} finally {
  rmSync(folder, { recursive: true });
}

let differ = false;
for (const [name, text] of made) {
  const at = join(here, name);
  const sum = createHash("sha256").update(text).digest("hex");
  const same = existsSync(at) && readFileSync(at, "utf8") === text;
  differ ||= !same;
  if (!check) writeFileSync(at, text);
  console.log(`${sum}  ${name}  ${Buffer.byteLength(text)} bytes${same ? "" : check ? "  DIFFERS" : "  written"}`);
}
if (check && differ) process.exit(1);
