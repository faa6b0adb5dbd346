// node-llama-cpp with its own binaries: node node.mjs MODEL PROMPT STATE prints one line of JSON. The text of a prompt,
// that of the prompt in two halves, and the same with the first half saved, cleared and loaded between them.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import path from "node:path";

const [model, prompt, state] = process.argv.slice(2);
const entry = path.join(process.cwd(), "node_modules", "node-llama-cpp", "dist", "index.js");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(entry).href);
const version = createRequire(import.meta.url)(path.join(path.dirname(entry), "..", "package.json")).version;

const llama = await getLlama({ gpu: false, build: "never", logLevel: LlamaLogLevel.warn, skipDownload: true });
const loaded = await llama.loadModel({ modelPath: model, gpuLayers: "max", defaultContextFlashAttention: true });
const context = await loaded.createContext({ contextSize: 1024, sequences: 1, threads: 2, flashAttention: true });
const sequence = context.getSequence();

async function generate(tokens, n) {
    const out = [];
    for await (const token of sequence.evaluate(tokens, { temperature: 0 })) {
        out.push(token);
        if (out.length >= n) break;
    }
    return out;
}

const tokens = loaded.tokenize(prompt);
const first = await generate(tokens, 24);
await sequence.clearHistory();
const head = tokens.slice(0, Math.floor(tokens.length / 2));
await sequence.evaluateWithoutGeneratingNewTokens(head);
const split = await generate(tokens.slice(head.length), 24);
await sequence.clearHistory();
await sequence.evaluateWithoutGeneratingNewTokens(head);
await sequence.saveStateToFile(state);
await sequence.clearHistory();
await sequence.loadStateFromFile(state, { acceptRisk: true });
const second = await generate(tokens.slice(head.length), 24);
const [text, halves, again] = [first, split, second].map((x) => loaded.detokenize(x));
console.log(JSON.stringify({ version, text, halves, again }));
await llama.dispose();
