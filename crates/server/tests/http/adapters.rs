//! Adapters that are loaded while a model runs: who may, and what the routes say.

use std::fs;

use fornax_server::ServerOptions;
use serde_json::json;

use crate::{
    client::{get, post, raw, request},
    world::{Setup, World},
};

const OPERATOR: &str = "operator-key-0123456789";
const USER: &str = "user-key-0123456789";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adapters_are_loaded_where_the_operator_allows_it_and_nowhere_else() {
    let world = World::ready(Setup::default()).await;
    let body = json!({"lora_name": "tuned", "lora_path": "tuned"});
    let refused = post(world.address, "/v1/load_lora_adapter", &body).await;
    assert_eq!(refused.status, 404, "{}", refused.body);
    assert!(refused.body.contains("--adapter-root"), "{}", refused.body);
    let missing = post(world.address, "/v1/load_lora_adapter", &json!({"lora_name": "tuned"})).await;
    assert_eq!((missing.status, &missing.json()["error"]["param"]), (400, &json!("lora_path")));
    assert_eq!(get(world.address, "/lora-adapters").await.json(), json!([]));
    let scaled = post(world.address, "/lora-adapters", &json!([{"id": 0, "scale": 0.5}])).await;
    assert!(scaled.status == 404 && scaled.body.contains("models of their own"), "{}", scaled.body);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_needs_the_right_to_load_what_others_use() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    fs::write(&file, format!("{OPERATOR} adapters\n{USER}\n")).unwrap();
    let options = ServerOptions { api_key_file: Some(file), ..Default::default() };
    let world = World::ready(Setup { options, loads_adapters: true, ..Setup::default() }).await;
    let send = async |method: &str, path: &str, key: &str, body: &serde_json::Value| {
        let bearer = format!("Bearer {key}");
        let headers = [("Authorization", bearer.as_str()), ("Content-Type", "application/json")];
        raw(world.address, &request(method, path, &headers, body.to_string().as_bytes())).await
    };
    let body = json!({"lora_name": "tuned", "lora_path": "here"});
    for path in ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"] {
        let refused = send("POST", path, USER, &body).await;
        assert_eq!(refused.status, 403, "{}", refused.body);
        assert!(refused.body.contains("the word `adapters`"), "{}", refused.body);
    }
    let loaded = send("POST", "/v1/load_lora_adapter", OPERATOR, &body).await;
    assert_eq!((loaded.status, &*loaded.body), (200, "Success: LoRA adapter 'tuned' added successfully."));
    // Everybody may use it; where it lies only those know who may load.
    let told = send("GET", "/lora-adapters", USER, &json!(null)).await.json();
    let wanted = json!([{"id": 0, "name": "tuned", "model": "script", "scale": 0.0}]);
    assert_eq!(told, wanted);
    let told = send("GET", "/lora-adapters", OPERATOR, &json!(null)).await.json();
    assert_eq!(told[0]["path"], "here");
    let elsewhere = json!({"lora_name": "other", "lora_path": "elsewhere"});
    let refused = send("POST", "/v1/load_lora_adapter", OPERATOR, &elsewhere).await;
    assert_eq!((refused.status, refused.json()["error"]["code"].clone()), (404, json!("MODEL_NOT_FOUND")));
    let unloaded = send("POST", "/v1/unload_lora_adapter", OPERATOR, &body).await;
    assert_eq!(unloaded.status, 200, "{}", unloaded.body);
    assert_eq!(send("GET", "/lora-adapters", USER, &json!(null)).await.json(), json!([]));
}
