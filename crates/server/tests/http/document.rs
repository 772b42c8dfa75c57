//! The API document: it says all that there is, and what it says is enforced.

use std::{env, path::PathBuf, process::Command};

use serde_json::{Value, json};

use crate::{
    client::{get, post},
    world::{Setup, World},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_document_lists_every_route_with_its_statuses() {
    let world = World::ready(Setup::default()).await;
    let document = get(world.address, "/openapi.json").await.json();
    let mut lines = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, route) in methods.as_object().unwrap() {
            let statuses: Vec<&str> =
                route["responses"].as_object().unwrap().keys().map(String::as_str).collect();
            lines.push(format!("{method} {path}: {}", statuses.join(" ")));
        }
    }
    lines.sort();
    insta::assert_snapshot!(lines.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bounds_of_the_document_are_the_bounds_of_the_server() {
    let world = World::ready(Setup::default()).await;
    let document = get(world.address, "/openapi.json").await.json();
    let params = document["components"]["schemas"]["Params"]["properties"].as_object().unwrap();
    let mut checked = 0;
    for (name, schema) in params {
        let is_integer = schema["type"].to_string().contains("integer");
        let step = if is_integer { 1.0 } else { 0.001 };
        let bounds = [(&schema["minimum"], -step), (&schema["maximum"], step)];
        for (bound, beyond) in
            bounds.into_iter().filter_map(|(bound, beyond)| Some((bound.as_f64()?, beyond)))
        {
            let number = |value: f64| if is_integer { json!(value as i64) } else { json!(value) };
            let blames = async |value: Value| {
                let mut body = json!({"prompt": "a", "max_tokens": 1});
                body[name] = value;
                let response = post(world.address, "/v1/completions", &body).await;
                // The engine may refuse a combination; only the field's own range is looked at here.
                let error = &response.json()["error"];
                let constraint = error["errors"][0]["constraint"].as_str().unwrap_or_default();
                let is_range = constraint.contains(" from ") || constraint.contains(" above ");
                response.status == 400 && is_range && error["param"] == *name
            };
            assert!(!blames(number(bound)).await, "{name} may be {bound}");
            assert!(blames(number(bound + beyond)).await, "{name} may not be {}", bound + beyond);
            checked += 1;
        }
    }
    assert!(checked > 30, "{checked}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schemathesis_finds_no_undocumented_status() {
    let Some(python) = env::var_os("FORNAX_PYTHON").map(PathBuf::from).filter(|python| python.exists())
    else {
        println!("SKIP schemathesis_finds_no_undocumented_status: no FORNAX_PYTHON with schemathesis");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let world = World::ready(crate::world::keeping(folder.path(), Setup::default())).await;
    let mut command = Command::new(python.with_file_name("schemathesis"));
    command
        .arg("run")
        .arg(format!("http://{}/openapi.json", world.address))
        .args(["--checks", "not_a_server_error,status_code_conformance,content_type_conformance"])
        .args(["--phases", "coverage,fuzzing", "--max-examples", "10", "--seed", "1", "--no-color"])
        .args(["--exclude-path", "/loading", "--request-timeout", "20"])
        .current_dir(folder.path());
    let ran = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}{}", String::from_utf8_lossy(&ran.stderr));
}
