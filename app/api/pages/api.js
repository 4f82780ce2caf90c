// The API page: reads openapi.json, with the key where the server wants one, and shows it in Swagger UI.

import { KeyForm, authorization } from "./key.js";
import { element } from "./markdown.js";

const api = document.getElementById("api");
const form = new KeyForm(load);

function say(text) {
  const words = element("p", text);
  words.className = "notice";
  words.setAttribute("role", "alert");
  api.replaceChildren(words);
}

async function load() {
  let answer;
  try {
    answer = await fetch("openapi.json", { headers: authorization() });
  } catch (error) {
    return say(`The server does not answer (${error.message}): load the page again.`);
  }
  if (answer.status === 401) {
    form.explain("");
    document.getElementById("ask").replaceChildren(form.node);
    return say("The description needs an API key.");
  }
  if (!answer.ok) return say(`openapi.json: the server answered ${answer.status}.`);
  show(await answer.json());
}

// "Try it out" sends the key too, and asks this server whatever prefix its routes have.
function show(spec) {
  document.getElementById("ask").replaceChildren();
  const server = new URL(".", location.href).href.replace(/\/$/, "");
  window.SwaggerUIBundle({
    spec: { ...spec, servers: [{ url: server }] },
    domNode: api,
    deepLinking: true,
    defaultModelsExpandDepth: 0,
    docExpansion: "list",
    validatorUrl: null,
    requestInterceptor: (request) => ({ ...request, headers: { ...authorization(), ...request.headers } }),
  });
}

load();
