// Runs the script of the page against a server, on elements that only keep what is written to them: node page_driver.mjs URL KEY < script
import {readFileSync} from "node:fs";

const [url, key] = process.argv.slice(2), elements = {};
const made = () => {
  const element = {
    value: "", textContent: "", className: "", attributes: {}, handlers: {}, children: [], classList: {add: name => { element.className += " " + name; }, toggle: (name, on) => { element.className = on ? name : ""; }},
    append: child => element.children.push(child), replaceChildren: () => { element.children = []; }, scrollIntoView: () => {}, focus: () => {},
    setAttribute: (name, value) => { element.attributes[name] = value; }, addEventListener: (name, handler) => { element.handlers[name] = handler; },
  };
  return element;
};
globalThis.document = {getElementById: id => elements[id] ??= made(), createElement: made};
globalThis.location = {href: url + "/"};
const real = globalThis.fetch;
globalThis.fetch = (path, options) => real(url + "/" + path, options);
Object.assign(document.getElementById("temperature"), {value: "0"});
Object.assign(document.getElementById("limit"), {value: "12"});
Object.assign(document.getElementById("mode"), {value: "chat"});
if (key) document.getElementById("key").value = key;
(0, eval)(readFileSync(0, "utf8"));

const until = async done => { for (let i = 0; i < 400 && !done(); i++) await new Promise(go => setTimeout(go, 25)); };
await until(() => elements.state?.textContent || elements.slots?.children.length);
for (const [mode, text] of key ? [["chat", "Name a river."], ["chat", "And another."], ["text", "It is a truth"]] : []) {
  elements.mode.value = mode;
  elements.text.value = text;
  elements.ask.handlers.submit({preventDefault: () => {}});
  await until(() => elements.stop.disabled);
}
const seen = () => (elements.curve?.attributes.points ?? "").split(" ").some(point => Number(point.split(",")[1]) < 19);
await until(() => !key || seen());  // the page looks once a second
const log = (elements.log?.children ?? []).map(turn => [turn.className, turn.textContent, ...turn.children.map(note => note.textContent)]);
const told = Object.fromEntries(Object.entries(elements).map(([id, element]) => [id, element.textContent]));
console.log(JSON.stringify({log, told, slots: elements.slots?.attributes["aria-label"], curve: elements.curve?.attributes.points}));
process.exit(0);
